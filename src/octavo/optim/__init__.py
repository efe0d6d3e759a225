"""Optimizers and FP8: what is known of how far their steps move a weight."""

from octavo.optim.predict_weight_scales import PredictedWeightScales, predict_weight_scales

__all__ = ["PredictedWeightScales", "predict_weight_scales"]
