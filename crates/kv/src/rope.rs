//! Rotary position embedding: frequencies, and tables of the cosines and sines of positions.
//!
//! [`Rope`] and [`RopeTable`] belong to one set of frequencies, [`Ropes`] and [`RopeTables`] to all layers of a model,
//! which share sets or have their own.

use std::sync::Arc;

use refrain_kernels::{Rotary, TableEntries, TableNumber};

/// Rotary frequencies, frozen for one request (length-dependent scalings choose theirs beforehand).
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    frequencies: Vec<f32>,
    scale: f32,
}

/// Cosines and sines of a run of positions: each `positions × rotary_dim/2`.
#[derive(Clone, Debug, Default)]
pub struct RopeTable {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
    /// The number of what the table holds, if several layers use it. Whatever changes the table takes the number away.
    number: Option<TableNumber>,
}

impl PartialEq for RopeTable {
    fn eq(&self, other: &RopeTable) -> bool {
        (&self.cos, &self.sin, self.half) == (&other.cos, &other.sin, other.half)
    }
}

/// Past this position an angle in `f32` loses more than 2⁻⁷ rad, so angles are formed in `f64`.
const EXACT_ANGLES: u32 = 100_000;

impl Rope {
    /// `frequencies` are radians a position, one for each of the `rotary_dim/2` pairs; cosines and sines are
    /// multiplied by `scale` (1 but for LongRoPE and YaRN).
    pub fn new(frequencies: Vec<f32>, scale: f32) -> Rope {
        Rope { frequencies, scale }
    }

    /// The table that rotates keys, rotated already, `by` positions further: `tokens` equal entries.
    pub fn turn(&self, by: u32, tokens: usize) -> RopeTable {
        Rope { frequencies: self.frequencies.clone(), scale: 1.0 }.table(std::iter::repeat_n(by, tokens))
    }

    /// The table that undoes the rotation of keys at `positions`, and their scaling.
    pub fn back(&self, positions: impl IntoIterator<Item = u32>) -> RopeTable {
        let inverse = Rope { frequencies: self.frequencies.clone(), scale: self.scale.recip() };
        let mut table = inverse.table(positions);
        table.sin.iter_mut().for_each(|sin| *sin = -*sin);
        table
    }

    /// These frequencies with the squared scale, for queries that meet keys from before RoPE: the queries then bear the
    /// scale of both.
    pub fn squared(&self) -> Rope {
        Rope { frequencies: self.frequencies.clone(), scale: self.scale * self.scale }
    }

    /// Rotates one token's vectors of `head_dim` elements to `position`, on the host.
    pub fn rotate(&self, x: &mut [f32], head_dim: usize, position: u32) {
        let RopeTable { cos, sin, half, .. } = self.table([position]);
        for head in x.chunks_exact_mut(head_dim) {
            for i in 0..half {
                let (a, b) = (head[i], head[i + half]);
                head[i] = a * cos[i] - b * sin[i];
                head[i + half] = b * cos[i] + a * sin[i];
            }
        }
    }

    /// Cosines and sines for `positions`.
    pub fn table(&self, positions: impl IntoIterator<Item = u32>) -> RopeTable {
        let mut table = RopeTable::default();
        self.fill(positions, &mut table);
        table
    }

    /// Overwrites `table` with the cosines and sines of `positions`.
    pub fn fill(&self, positions: impl IntoIterator<Item = u32>, table: &mut RopeTable) {
        table.clear(self.frequencies.len());
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

    /// Whether the table holds no position.
    pub fn is_empty(&self) -> bool {
        self.cos.is_empty()
    }

    /// All cosines and sines.
    pub fn all(&self) -> Rotary<'_> {
        self.slice(0, self.len())
    }

    /// Cosines and sines of entries `from..to`.
    pub fn slice(&self, from: usize, to: usize) -> Rotary<'_> {
        let range = from * self.half..to * self.half;
        let entries = self.number.map(|table| TableEntries { table, first: from });
        Rotary { cos: &self.cos[range.clone()], sin: &self.sin[range], entries }
    }

    /// Empties the table, whose entries have `half` pairs from now on.
    fn clear(&mut self, half: usize) {
        self.half = half;
        self.number = None;
        self.cos.clear();
        self.sin.clear();
    }

    /// Overwrites `table` with the entries at `indices`.
    pub fn gather(&self, indices: &[u32], table: &mut RopeTable) {
        table.clear(self.half);
        for &index in indices {
            let Rotary { cos, sin, .. } = self.slice(index as usize, index as usize + 1);
            table.cos.extend_from_slice(cos);
            table.sin.extend_from_slice(sin);
        }
    }
}

/// Rotary frequencies of one request by layer: the distinct ones once, and which of them each layer uses.
#[derive(Clone, Debug, PartialEq)]
pub struct Ropes {
    distinct: Arc<[Rope]>,
    of_layer: Arc<[usize]>,
}

/// Tables of the same positions by layer: one table for each distinct set of frequencies.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RopeTables {
    distinct: Vec<RopeTable>,
    of_layer: Arc<[usize]>,
}

impl Ropes {
    /// Layer `l` uses `distinct[of_layer[l]]`.
    ///
    /// # Panics
    /// If an entry of `of_layer` is no index into `distinct`.
    pub fn new(distinct: Vec<Rope>, of_layer: Vec<usize>) -> Ropes {
        assert!(
            of_layer.iter().all(|rope| *rope < distinct.len()),
            "every layer has one of {}",
            distinct.len()
        );
        Ropes { distinct: distinct.into(), of_layer: of_layer.into() }
    }

    /// One set of frequencies for all of `layers`.
    pub fn shared(rope: Rope, layers: usize) -> Ropes {
        Ropes::new(vec![rope], vec![0; layers])
    }

    /// The frequencies of `layer`.
    pub fn layer(&self, layer: usize) -> &Rope {
        &self.distinct[self.of_layer[layer]]
    }

    /// Cosines and sines for `positions`.
    pub fn tables(&self, positions: impl IntoIterator<Item = u32> + Clone) -> RopeTables {
        let mut tables = RopeTables::default();
        self.fill(positions, &mut tables);
        tables
    }

    /// Overwrites `tables` with the cosines and sines of `positions`, in the memory that they have.
    pub fn fill(&self, positions: impl IntoIterator<Item = u32> + Clone, tables: &mut RopeTables) {
        tables.adopt(self.distinct.len(), &self.of_layer);
        for (rope, table) in self.distinct.iter().zip(&mut tables.distinct) {
            rope.fill(positions.clone(), table);
            table.number = Some(TableNumber::unused());
        }
    }
}

impl RopeTables {
    /// The table of `layer`.
    pub fn layer(&self, layer: usize) -> &RopeTable {
        &self.distinct[self.of_layer[layer]]
    }

    /// Number of positions, the same at every layer.
    pub fn len(&self) -> usize {
        self.distinct.first().map_or(0, RopeTable::len)
    }

    /// Whether the tables hold no position.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Overwrites `tables` with the entries at `indices`, in the memory that they have.
    pub fn gather(&self, indices: &[u32], tables: &mut RopeTables) {
        tables.adopt(self.distinct.len(), &self.of_layer);
        for (from, to) in self.distinct.iter().zip(&mut tables.distinct) {
            from.gather(indices, to);
            to.number = Some(TableNumber::unused());
        }
    }

    /// Takes over which layer uses which of `distinct` tables.
    fn adopt(&mut self, distinct: usize, of_layer: &Arc<[usize]>) {
        self.distinct.resize_with(distinct, RopeTable::default);
        self.of_layer.clone_from(of_layer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_share_tables_or_have_their_own() {
        let (near, far) = (Rope::new(vec![1.0, 0.25], 1.0), Rope::new(vec![0.5, 0.125], 1.0));
        let ropes = Ropes::new(vec![near.clone(), far.clone()], vec![0, 0, 1, 0]);
        assert_eq!((ropes.layer(1), ropes.layer(2)), (&near, &far));
        let tables = ropes.tables([0, 3, 7]);
        assert_eq!((tables.len(), tables.layer(2).all().dim(3)), (3, 4));
        assert_eq!(tables.layer(3), &near.table([0, 3, 7]));
        assert_eq!(tables.layer(2), &far.table([0, 3, 7]));
        assert!(std::ptr::eq(tables.layer(0), tables.layer(3)), "one table for each set of frequencies");
        let mut gathered = Ropes::shared(far.clone(), 1).tables([5, 6]);
        tables.gather(&[2, 0], &mut gathered);
        assert_eq!(gathered, ropes.tables([7, 0]));
        let numbers = |tables: &RopeTables| {
            [0, 2].map(|layer| {
                tables.layer(layer).slice(1, 2).entries.map(|entries| (entries.table, entries.first))
            })
        };
        let before = numbers(&gathered);
        assert_eq!(before.map(|entries| entries.unwrap().1), [1, 1]);
        assert_ne!(before[0], before[1]);
        tables.gather(&[2, 1], &mut gathered);
        let after = numbers(&gathered);
        assert!(
            before.iter().all(|number| !after.contains(number)),
            "a table that changes gets another number"
        );
        ropes.fill([7, 0], &mut gathered);
        assert!(after.iter().all(|number| !numbers(&gathered).contains(number)));
        near.fill([1], &mut gathered.distinct[0]);
        assert_eq!(gathered.layer(0).all().entries, None);
        assert!(RopeTables::default().is_empty());
        assert_ne!(ropes, Ropes::shared(near, 4));
    }

    #[test]
    fn table_holds_cosines_of_position_times_frequency() {
        let rope = Rope::new(vec![1.0, 0.25], 2.0);
        let table = rope.table([0, 3, 200_000]);
        assert_eq!(table.len(), 3);
        assert_eq!((table.slice(0, 1).cos, table.slice(0, 1).sin), (&[2.0, 2.0][..], &[0.0, 0.0][..]));
        assert_eq!(table.slice(1, 2).cos, &[3f32.cos() * 2.0, 0.75f32.cos() * 2.0]);
        assert!((f64::from(table.slice(2, 3).sin[0]) - 2.0 * 200_000f64.sin()).abs() < 1e-6);
        let back = rope.back([3]);
        assert_eq!((back.cos[0], back.sin[0]), (3f32.cos() * 0.5, -3f32.sin() * 0.5));
        assert_eq!(rope.squared().table([3]).cos[0], 3f32.cos() * 4.0);
        let mut gathered = RopeTable::default();
        table.gather(&[2, 0], &mut gathered);
        assert_eq!(gathered.slice(1, 2), table.slice(0, 1));
    }
}
