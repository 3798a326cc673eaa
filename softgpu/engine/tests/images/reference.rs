//! The reference: the formulas of the programming guide in f64, one axis after the other.

use softgpu_engine::{AddressMode, Filter, Sampler};

/// The texel on an axis of `n` texels, found step by step; `None` in the border.
pub(crate) fn wrapped(mut i: i64, n: i64, mode: AddressMode) -> Option<i64> {
    match mode {
        AddressMode::Clamp => Some(i.max(0).min(n - 1)),
        AddressMode::Border => (i >= 0 && i < n).then_some(i),
        AddressMode::Wrap => {
            while i < 0 {
                i += n;
            }
            while i >= n {
                i -= n;
            }
            Some(i)
        }
        AddressMode::Mirror => loop {
            if i < 0 {
                i = -1 - i;
            } else if i >= n {
                i = 2 * n - 1 - i;
            } else {
                return Some(i);
            }
        },
    }
}

/// Interpolates along the last axis of `at`, whose texels `texel` returns. `extents` are those of the axes.
pub(crate) fn filtered(
    sampler: &Sampler,
    extents: &[i64],
    at: &[f64],
    texel: &dyn Fn(&[Option<i64>]) -> f64,
) -> f64 {
    fn axis(
        sampler: &Sampler,
        extents: &[i64],
        at: &[f64],
        done: &mut Vec<Option<i64>>,
        texel: &dyn Fn(&[Option<i64>]) -> f64,
    ) -> f64 {
        let n = done.len();
        if n == at.len() {
            return texel(done);
        }
        let size = extents[n];
        let mut mode = sampler.address[n];
        let x = if sampler.normalized { at[n] * size as f64 } else { at[n] };
        if !sampler.normalized && matches!(mode, AddressMode::Wrap | AddressMode::Mirror) {
            mode = AddressMode::Clamp;
        }
        let mut value = |i: i64| {
            done.push(wrapped(i, size, mode));
            let v = axis(sampler, extents, at, done, texel);
            done.pop();
            v
        };
        if sampler.filter == Filter::Point {
            return value(x.floor() as i64);
        }
        let shifted = x - 0.5;
        let mut i = shifted.floor();
        // A weight has nine bits, of which eight are a fraction.
        let mut weight = ((shifted - i) * 256.0).round() / 256.0;
        if weight == 1.0 {
            (i, weight) = (i + 1.0, 0.0);
        }
        let (a, b) = (value(i as i64), value(i as i64 + 1));
        (1.0 - weight) * a + weight * b
    }
    axis(sampler, extents, at, &mut Vec::new(), texel)
}

/// True if a word is near a value.
pub(crate) fn near(word: u32, wanted: f64) -> bool {
    let got = f64::from(f32::from_bits(word));
    (got - wanted).abs() <= 1e-6 * wanted.abs().max(1.0)
}
