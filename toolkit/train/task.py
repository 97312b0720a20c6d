"""What a sample means. Order, elasticity and resume know record numbers only; "token" appears in the text task."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import nn

from toolkit.engine.protocol import MicroBatch
