"""Natural-gradient training for PyTorch, from 1.3 times the cost of SGD on a CPU."""

from quasidiag import reference
from quasidiag.adagrad import AdaGrad
from quasidiag.diagnostics import Diagnostics, diagnostics
from quasidiag.langevin import Langevin
from quasidiag.layers import Adapter, register_layer
from quasidiag.moments import Moments
from quasidiag.optimizer import Riemannian
from quasidiag.outputs import Bernoulli, Categorical, Gaussian, LearnedGaussian, OutputModel
from quasidiag.posterior import Posterior
from quasidiag.presets import DOP, QDOP, DMCNat, DNat, QDMCNat, QDNat
from quasidiag.reductions import qd_rank_one_update, qd_solve

__all__ = [
    "DOP",
    "QDOP",
    "AdaGrad",
    "Adapter",
    "Bernoulli",
    "Categorical",
    "DMCNat",
    "DNat",
    "Diagnostics",
    "Gaussian",
    "Langevin",
    "LearnedGaussian",
    "Moments",
    "OutputModel",
    "Posterior",
    "QDMCNat",
    "QDNat",
    "Riemannian",
    "diagnostics",
    "qd_rank_one_update",
    "qd_solve",
    "reference",
    "register_layer",
]

__version__ = "0.1.0"
