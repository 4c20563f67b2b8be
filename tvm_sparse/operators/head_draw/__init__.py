"""A token of each row of an output layer's softmax, drawn without the logits in memory."""
