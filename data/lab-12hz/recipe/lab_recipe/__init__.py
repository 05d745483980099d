"""How the bundled checkpoint was trained: text, speech, losses, loop, export. Start with the README beside this package.

sentences → corpus ┐
                   ├→ crops → trainer (model, quantizer, losses, discriminator, schedule, state) → export → evaluate
       real_speech ┘
"""
