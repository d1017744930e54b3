"""The language engine: continuous batching over transformers' model code, with attention and K/V of our own.

Knows no jobs, no HTTP and no Redis; `workers.engine_process` feeds it.
"""
