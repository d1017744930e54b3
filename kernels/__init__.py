"""Triton kernels with torch paths, one op a file: what the language engine and the video workers stand on.

Every op is `<op>()` (validates, then Triton or torch by `dispatch`), `<op>_triton()` (launches the kernel, validated
arguments only), `<op>_torch()` where torch has a faster right path than the reference, and `<op>_reference()`.
The package has no version of its own: a package of this name is known to other libraries by its version.
"""
