"""EXL2, GPTQ and FP16 models on NVIDIA GPUs, with the package exllamav2."""
