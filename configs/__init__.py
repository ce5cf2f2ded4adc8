"""The configuration of a run: frozen Structs (schema), the reader (load) and one TOML file per run."""
