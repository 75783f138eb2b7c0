"""Serving with Triton: repository generator, supervisor, and the logic of the model files."""
