"""What `doctor` looks at, one function a question. Each answers with findings and knows nothing of the others."""
