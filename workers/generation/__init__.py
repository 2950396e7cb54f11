"""What every engine needs around the model: text, stop strings, sampling. Pure code, no I/O."""
