"""Configuration: TOML recipe → pydantic models → one ordered pipeline of normalisations and checks with reasons."""
