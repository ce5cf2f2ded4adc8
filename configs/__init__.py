"""The configuration of a run: frozen Structs (schema), their reader (load), one TOML per run."""
