//! Rotary position embedding: frequencies and the table of cosines and sines of positions.

/// Rotary frequencies, frozen for one request (length-dependent scalings choose theirs beforehand).
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    frequencies: Vec<f32>,
    scale: f32,
}

/// Cosines and sines of a run of positions: each `positions × rotary_dim/2`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RopeTable {
    /// Cosines, `positions × rotary_dim/2`.
    pub cos: Vec<f32>,
    /// Sines, `positions × rotary_dim/2`.
    pub sin: Vec<f32>,
    half: usize,
}

/// Past this position an angle in `f32` loses more than 2⁻⁷ rad, so angles are formed in `f64`.
const EXACT_ANGLES: u32 = 100_000;

impl Rope {
    /// `frequencies` are radians a position, one for each of the `rotary_dim/2` pairs; cosines and sines are
    /// multiplied by `scale` (1 but for LongRoPE).
    pub fn new(frequencies: Vec<f32>, scale: f32) -> Rope {
        Rope { frequencies, scale }
    }

    /// What turns keys that are rotated already `by` positions further: a table of `tokens` equal entries.
    pub fn turn(&self, by: u32, tokens: usize) -> RopeTable {
        Rope { frequencies: self.frequencies.clone(), scale: 1.0 }.table(std::iter::repeat_n(by, tokens))
    }

    /// What turns keys that are rotated to `positions` back to what they were.
    pub fn back(&self, positions: impl IntoIterator<Item = u32>) -> RopeTable {
        let inverse = Rope { frequencies: self.frequencies.clone(), scale: self.scale.recip() };
        let mut table = inverse.table(positions);
        table.sin.iter_mut().for_each(|sin| *sin = -*sin);
        table
    }

    /// The same with its scale twice: for queries that meet keys as they are before rotation.
    pub fn squared(&self) -> Rope {
        Rope { frequencies: self.frequencies.clone(), scale: self.scale * self.scale }
    }

    /// Cosines and sines for `positions`.
    pub fn table(&self, positions: impl IntoIterator<Item = u32>) -> RopeTable {
        let mut table = RopeTable::default();
        self.fill(positions, &mut table);
        table
    }

    /// Makes `table` that of `positions`.
    pub fn fill(&self, positions: impl IntoIterator<Item = u32>, table: &mut RopeTable) {
        table.half = self.frequencies.len();
        table.cos.clear();
        table.sin.clear();
        for position in positions {
            for &frequency in &self.frequencies {
                let (sin, cos) = if position < EXACT_ANGLES {
                    (position as f32 * frequency).sin_cos()
                } else {
                    let (sin, cos) = (f64::from(position) * f64::from(frequency)).sin_cos();
                    (sin as f32, cos as f32)
                };
                table.cos.push(cos * self.scale);
                table.sin.push(sin * self.scale);
            }
        }
    }
}

impl RopeTable {
    /// Number of positions.
    pub fn len(&self) -> usize {
        self.cos.len().checked_div(self.half).unwrap_or(0)
    }

    /// Whether it holds no position.
    pub fn is_empty(&self) -> bool {
        self.cos.is_empty()
    }

    /// Cosines and sines of entries `from..to`.
    pub fn slice(&self, from: usize, to: usize) -> (&[f32], &[f32]) {
        let range = from * self.half..to * self.half;
        (&self.cos[range.clone()], &self.sin[range])
    }

    /// Makes `table` the entries at `indices`.
    pub fn gather(&self, indices: &[u32], table: &mut RopeTable) {
        table.half = self.half;
        table.cos.clear();
        table.sin.clear();
        for &index in indices {
            let (cos, sin) = self.slice(index as usize, index as usize + 1);
            table.cos.extend_from_slice(cos);
            table.sin.extend_from_slice(sin);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_holds_cosines_of_position_times_frequency() {
        let rope = Rope::new(vec![1.0, 0.25], 2.0);
        let table = rope.table([0, 3, 200_000]);
        assert_eq!(table.len(), 3);
        assert_eq!(table.slice(0, 1), (&[2.0, 2.0][..], &[0.0, 0.0][..]));
        assert_eq!(table.slice(1, 2).0, &[3f32.cos() * 2.0, 0.75f32.cos() * 2.0]);
        assert!((f64::from(table.slice(2, 3).1[0]) - 2.0 * 200_000f64.sin()).abs() < 1e-6);
        let back = rope.back([3]);
        assert_eq!((back.cos[0], back.sin[0]), (3f32.cos() * 0.5, -3f32.sin() * 0.5));
        assert_eq!(rope.squared().table([3]).cos[0], 3f32.cos() * 4.0);
        let mut gathered = RopeTable::default();
        table.gather(&[2, 0], &mut gathered);
        assert_eq!(gathered.slice(1, 2), table.slice(0, 1));
    }
}
