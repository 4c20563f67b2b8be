"""The call of the gradient, for autograd: no public function."""
SIGNATURES: dict = {}
