"""The gradient of a recurrent layer's inputs and states: `problem` declares it."""
