"""What the templates of recurrent layers share, whatever their weights are kept as."""
