"""Says where the training tools of version 0.2 went."""

raise ImportError("gpumem_exporter.training is now `import gpumem_toolkit`, in the package gpumem-toolkit")
