"""residual: a paged KV cache in quantized formats that also has the latest and the first tokens as computed."""
