"""Tests of the ExLlamaV2 engine without a GPU: the genuine package on the CPU harness, with tiny models made on the spot."""
