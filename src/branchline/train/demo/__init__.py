from pathlib import Path

MODEL_FOLDER = Path(__file__).parent / "model"
"""The small model that the demo starts from."""
