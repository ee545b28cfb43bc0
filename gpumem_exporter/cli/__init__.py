"""The commands, by subject. click and Rich are imported here only, and never by `run`.

Wrong usage is a ConfigurationError, also of a value in the environment. `main` turns it, and every other GpumemError,
into one line and an exit code, so most functions here may raise them.

Other folders import: `action_dialog`, `api_client`, `completion`, `kube`, `node_view`, `options`, `program`, `usage`.
"""
