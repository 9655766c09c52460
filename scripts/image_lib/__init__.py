"""Parts of scripts/image-steps."""
