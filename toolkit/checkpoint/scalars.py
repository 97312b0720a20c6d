"""Names of what training resumes from besides tensors, in the scalars of every source: plain JSON types."""

STEP = "step"  # int: optimizer steps done, skipped ones too
CONSUMED = "consumed_samples"  # int
OPTIMIZER_STEP = "optimizer_step"  # int: steps that the optimizer counts, for Adam's bias correction
WEIGHTS_DTYPE = "weights_dtype"  # str: of the weights, in a source that holds their fp32 masters alone
LOSS_SCALER = "loss_scaler"  # of fp16: a mapping with the keys SCALER_STATE
SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
# A mapping with the keys OPTIM_SETTINGS: what engines' own loaders take over from a checkpoint, whatever the run says. ``lr`` is the
# learning rate of the next step, ``weight_decay`` that of the parameters that decay.
OPTIM = "optim"
OPTIM_SETTINGS = ("lr", "betas", "eps", "weight_decay")
