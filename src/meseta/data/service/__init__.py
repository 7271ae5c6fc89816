"""Reader service: processes that decode rows for trainers. `client` and `server` share the protocol in this folder."""
