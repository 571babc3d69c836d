"""Commands: train, compare, fine-tune, translate, convert and report, on the plugin."""
