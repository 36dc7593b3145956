"""What runs on the training ranks. The controller never imports it."""
