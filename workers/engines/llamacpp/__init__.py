"""llama.cpp on the CPU through its C API."""
