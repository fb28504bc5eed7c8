"""Vision towers: from patches of images and videos to features in place of token embeddings."""
