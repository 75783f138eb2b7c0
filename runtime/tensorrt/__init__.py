"""Runs compiled engines on a GPU, with `tensorrt` or `tensorrt_rtx`; torch owns the memory."""
