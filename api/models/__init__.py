"""Pretrained architectures over the primitives of eggpu.nn, built from model files."""
