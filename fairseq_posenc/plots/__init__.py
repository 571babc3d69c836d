"""Looking inside trained models: what their attentions do with a sentence, and their tables."""
