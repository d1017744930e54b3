"""Video generation: loops over diffusers' modules, attention, extension, encoding; knows no jobs and no HTTP."""
