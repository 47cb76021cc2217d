//! Random choices that are equal on every machine.

use std::collections::HashSet;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// A generator of random choices.
#[derive(Debug)]
pub(super) struct Random(ChaCha8Rng);

impl Random {
    /// The generator of a name; different names give unrelated numbers.
    pub(super) fn named(name: &str) -> Random {
        Random(ChaCha8Rng::from_seed(*blake3::hash(name.as_bytes()).as_bytes()))
    }

    /// A number below `count`, which is not 0.
    pub(super) fn below(&mut self, count: usize) -> usize {
        // The bias, count in 2⁶⁴, is nothing.
        ((u128::from(self.0.next_u64()) * count as u128) >> 64) as usize
    }

    /// One of a list that is not empty.
    pub(super) fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }

    pub(super) fn shuffle<T>(&mut self, list: &mut [T]) {
        for last in (1..list.len()).rev() {
            list.swap(last, self.below(last + 1));
        }
    }

    /// `count` different numbers below `among`, or all if there are fewer, in random order.
    pub(super) fn places(&mut self, count: usize, among: usize) -> Vec<usize> {
        let mut places: Vec<usize> = (0..among).collect();
        for i in 0..count.min(among) {
            let other = i + self.below(among - i);
            places.swap(i, other);
        }
        places.truncate(count);
        places
    }

    /// `count` different values.
    pub(super) fn distinct<T: Clone + Eq + std::hash::Hash>(
        &mut self,
        count: usize,
        mut one: impl FnMut(&mut Random) -> T,
    ) -> Vec<T> {
        let mut seen = HashSet::new();
        let mut values = Vec::with_capacity(count);
        while values.len() < count {
            let value = one(self);
            if seen.insert(value.clone()) {
                values.push(value);
            }
        }
        values
    }

    /// `count` letters from `first` (`A` or `a`) to the end of its alphabet.
    pub(super) fn letters(&mut self, first: u8, count: usize) -> String {
        (0..count).map(|_| char::from(first + self.below(26) as u8)).collect()
    }

    /// A random UUID, version 4 (RFC 9562).
    pub(super) fn uuid(&mut self) -> String {
        let bits = (u128::from(self.0.next_u64()) << 64) | u128::from(self.0.next_u64());
        let bits = bits & !(0xf << 76) | (0x4 << 76);
        let bits = bits & !(0b11 << 62) | (0b10 << 62);
        let digits = format!("{bits:032x}");
        [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_gives_the_same_choices_everywhere() {
        // Written down once: a generator that changes changes every benchmark made with it.
        assert_eq!(Random::named("ruler").uuid(), "97a5ca9b-b997-45b9-8ce4-8f103292cb4e");
        assert_ne!(Random::named("ruler").uuid(), Random::named("ruler 2").uuid());
    }

    #[test]
    fn a_uuid_says_its_version_and_variant() {
        let mut draw = Random::named("uuid");
        for _ in 0..100 {
            let uuid = draw.uuid();
            assert_eq!(uuid.split('-').map(str::len).collect::<Vec<_>>(), [8, 4, 4, 4, 12]);
            assert_eq!(uuid.as_bytes()[14], b'4');
            assert!(b"89ab".contains(&uuid.as_bytes()[19]), "{uuid}");
        }
    }

    #[test]
    fn places_are_different_and_every_one_is_drawn() {
        let mut draw = Random::named("places");
        let mut seen = [0; 10];
        for _ in 0..1000 {
            let places = draw.places(3, 10);
            assert_eq!(places.iter().collect::<HashSet<_>>().len(), 3);
            places.iter().for_each(|place| seen[*place] += 1);
        }
        assert!(seen.iter().all(|times| (200..400).contains(times)), "{seen:?}");
        assert_eq!(draw.places(5, 2).len(), 2);
    }

    #[test]
    fn a_shuffle_leads_every_item_everywhere() {
        let mut draw = Random::named("shuffle");
        let mut first = [0; 5];
        for _ in 0..1000 {
            let mut list = [0, 1, 2, 3, 4];
            draw.shuffle(&mut list);
            first[list[0]] += 1;
        }
        assert!(first.iter().all(|times| (140..260).contains(times)), "{first:?}");
    }
}
