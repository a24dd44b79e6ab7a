"""A prompt in parallel, then a character at a time, with the state carried by hand. Runs on NumPy alone."""

import numpy as np

from pararnn import ParaGRU, decode_step, newton_apply

LETTERS = "abcdefgh"


def main() -> None:
    rng = np.random.default_rng(0)
    # Nothing is trained here: the point is that both ways agree.
    table = np.eye(len(LETTERS), dtype=np.float32)
    cells = [ParaGRU(len(LETTERS), 16, seed=0), ParaGRU(16, 16, seed=1)]
    head = rng.standard_normal((16, len(LETTERS)), dtype=np.float32)

    prompt = rng.integers(0, len(LETTERS), size=(1, 500))
    y, states = table[prompt], []
    for cell in cells:
        y = newton_apply(cell, y)
        states.append(y[:, -1])

    text = []
    letter = np.argmax(y[:, -1] @ head, axis=-1)
    for _ in range(20):
        text.append(LETTERS[int(letter[0])])
        h = table[letter]
        for k, cell in enumerate(cells):
            states[k] = h = decode_step(cell, states[k], h)
        letter = np.argmax(h @ head, axis=-1)
    print("".join(text))

    # The same as running prompt and text at once.
    whole = np.concatenate([prompt, [[LETTERS.index(c) for c in text]]], axis=1)
    y = table[whole]
    for cell in cells:
        y = newton_apply(cell, y)
    print("largest difference of the state:", float(np.abs(y[:, -1] - states[-1]).max()))


if __name__ == "__main__":
    main()
