"""Models carried to Hugging Face's transformers and back."""
