//! Attention over two sets of keys, merged.

/// Attention over two sets of keys becomes attention over their union: `out` (`rows × H × d`) and `lse` (`rows × H`, the
/// logarithms of the softmax's sums) are those of one set, `other` those of the other. Any split and order gives the same;
/// −∞ is the sum over no key.
pub(crate) fn merge(out: &mut [f32], lse: &mut [f32], other: &[f32], other_lse: &[f32]) {
    let d = out.len() / lse.len().max(1);
    let heads = out.chunks_exact_mut(d.max(1)).zip(other.chunks_exact(d.max(1)));
    for ((a, b), (sa, sb)) in heads.zip(lse.iter_mut().zip(other_lse)) {
        let max = sa.max(*sb);
        if max == f32::NEG_INFINITY {
            continue;
        }
        let (wa, wb) = ((*sa - max).exp(), (*sb - max).exp());
        let total = wa + wb;
        let (fa, fb) = (wa / total, wb / total);
        a.iter_mut().zip(b).for_each(|(a, b)| *a = fa * *a + fb * b);
        *sa = max + total.ln();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_15_any_split_and_order_of_keys_is_attention_over_all_of_them() {
        let (heads, d, keys) = (3, 8, 40);
        let value = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
        let scores: Vec<f32> = (0..heads * keys).map(|i| 9.0 * value(i + 7)).collect();
        let values: Vec<f32> = (0..heads * keys * d).map(|i| value(i + 100_000)).collect();
        let over = |slots: &[usize]| {
            let (mut out, mut lse) = (vec![0.0; heads * d], vec![f32::NEG_INFINITY; heads]);
            for h in 0..heads {
                let weight = |s: &usize| f64::from(scores[h * keys + s]).exp();
                let total: f64 = slots.iter().map(weight).sum();
                if total > 0.0 {
                    lse[h] = total.ln() as f32;
                }
                for s in slots {
                    for e in 0..d {
                        let v = f64::from(values[(h * keys + s) * d + e]);
                        out[h * d + e] += (weight(s) / total * v) as f32;
                    }
                }
            }
            (out, lse)
        };
        let (whole, sum) = over(&(0..keys).collect::<Vec<_>>());
        for parts in [vec![0..39, 39..40], vec![0..1, 1..40], vec![30..40, 0..12, 12..12, 12..30]] {
            let (mut out, mut lse) = over(&[]);
            for part in parts {
                let (other, other_lse) = over(&part.collect::<Vec<_>>());
                merge(&mut out, &mut lse, &other, &other_lse);
            }
            assert!(out.iter().zip(&whole).all(|(a, b)| (a - b).abs() < 1e-5));
            assert!(lse.iter().zip(&sum).all(|(a, b)| (a - b).abs() < 1e-5));
        }
    }
}
