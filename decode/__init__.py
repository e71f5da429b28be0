"""The captured decode step: kernels, the weights they read, graphs, the paged cache, samplers and their noise."""
