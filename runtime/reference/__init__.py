"""Runs the engine's ONNX graphs on the CPU with NumPy."""
