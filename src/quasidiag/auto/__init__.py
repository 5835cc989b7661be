"""The step without a learning rate, ``step="auto"``: each file is one part of it, listed in the order in which they work.

- ``replay`` keeps the minibatches of a step and runs the model on them again: ``calls`` records the model's calls,
  ``reading`` finds the criterion's input among the model's outputs, ``rerun`` runs the model once more, ``division`` on a
  part of the samples, ``standing_in`` puts other parameters in the place of the model's, ``witness`` detects a gradient
  scaler, and ``fingerprint`` tells whether the data are those of the last step.
- ``proposal`` computes the direction: ``orthogonal`` gives all singular directions the same strength, ``proportions`` says
  how far each layer goes, and ``stacks`` puts layers of one shape into one tensor, to compute them together.
- ``quadratic`` computes the length from the model of the loss along ``directions`` (``parabola`` is that model as a few
  numbers), with weight decay in it (``penalty``), and judges what the last steps did; ``bounce`` lengthens steps where
  crossing the valley costs nothing.
- ``rhythm`` says how often metric and model are measured, ``moving`` takes the step, ``rest`` averages the parameters, and
  ``report`` is what one step leaves to the next.
- ``descent`` is the step as a whole.
"""
