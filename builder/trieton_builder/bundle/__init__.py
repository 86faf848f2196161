"""Write bundles and refresh them; the config of the served model."""
