"""The command line; `diff`, `top` and `explain` are in `reporting`, `config` in `config`."""
