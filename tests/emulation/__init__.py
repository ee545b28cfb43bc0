"""An emulated GPU node: real PyTorch, real pynvml and real tools on a machine without a GPU. See README.md."""
