"""Layers, programs and stacks of transforms, drawn at random; what they have to compute."""
