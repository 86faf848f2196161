"""The offline part of Trieton: catalogue and model -> bundle -> repository, and the `trieton` command."""
