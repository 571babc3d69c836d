"""Models carried elsewhere: to Hugging Face's transformers and back, to other positions."""
