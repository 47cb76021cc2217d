//! How many bytes deflated data hold, told without writing them. (RFC 1951)
//!
//! `hayro-syntax` goes on where others find an error: behind a distance that leads before the data, a wrong length of a stored block,
//! or codes that contradict each other. This count takes the same steps, so that no error can hide data from it.

use std::sync::LazyLock;

/// The order in which the lengths of the codes for lengths stand.
const ORDER: [usize; 19] = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

/// The shortest match of each code, and the bits that are added to it.
const MATCHES: [(usize, u32); 29] = [
    (3, 0),
    (4, 0),
    (5, 0),
    (6, 0),
    (7, 0),
    (8, 0),
    (9, 0),
    (10, 0),
    (11, 1),
    (13, 1),
    (15, 1),
    (17, 1),
    (19, 2),
    (23, 2),
    (27, 2),
    (31, 2),
    (35, 3),
    (43, 3),
    (51, 3),
    (59, 3),
    (67, 4),
    (83, 4),
    (99, 4),
    (115, 4),
    (131, 5),
    (163, 5),
    (195, 5),
    (227, 5),
    (258, 0),
];

/// The shortest distance of each code, and the bits that are added to it.
const DISTANCES: [(usize, u32); 30] = [
    (1, 0),
    (2, 0),
    (3, 0),
    (4, 0),
    (5, 1),
    (7, 1),
    (9, 2),
    (13, 2),
    (17, 3),
    (25, 3),
    (33, 4),
    (49, 4),
    (65, 5),
    (97, 5),
    (129, 6),
    (193, 6),
    (257, 7),
    (385, 7),
    (513, 8),
    (769, 8),
    (1025, 9),
    (1537, 9),
    (2049, 10),
    (3073, 10),
    (4097, 11),
    (6145, 11),
    (8193, 12),
    (12289, 12),
    (16385, 13),
    (24577, 13),
];

static FIXED: LazyLock<(Codes, Codes)> = LazyLock::new(|| {
    let length = |code| match code {
        144..256 => 9,
        256..280 => 7,
        _ => 8,
    };
    (Codes::new(&(0..288).map(length).collect::<Vec<u8>>()), Codes::new(&[5; 30]))
});

/// The bytes that deflated data hold; other data hold few. Counts little beyond `limit`.
pub(super) fn deflated(data: &[u8], limit: usize) -> usize {
    let zlib = matches!(data, [method, flags, ..] if method & 0x0F == 8
        && (u16::from(*method) << 8 | u16::from(*flags)).is_multiple_of(31) && flags & 0x20 == 0);
    let mut bits = Bits { data: if zlib { &data[2..] } else { data }, held: 0, count: 0 };
    let mut total = 0;
    while !bits.data.is_empty() && total <= limit {
        if block(&mut bits, &mut total, limit).is_none_or(|last| last) {
            break;
        }
    }
    total
}

/// Counts a block, and tells whether it is the last; none where the data end.
fn block(bits: &mut Bits<'_>, total: &mut usize, limit: usize) -> Option<bool> {
    let header = bits.take(3)?;
    match header >> 1 {
        0 => stored(bits, total)?,
        1 => compressed(bits, &FIXED.0, &FIXED.1, total, limit)?,
        2 => {
            let (literals, distances) = bits.codes()?;
            compressed(bits, &literals, &distances, total, limit)?;
        }
        _ => return None,
    }
    Some(header & 1 != 0)
}

fn stored(bits: &mut Bits<'_>, total: &mut usize) -> Option<()> {
    (bits.held, bits.count) = (0, 0);
    let (head, data) = bits.data.split_at_checked(4).unwrap_or((bits.data, &[]));
    let length = usize::from(u16::from_le_bytes([*head.first()?, *head.get(1)?]));
    let (block, rest) = data.split_at_checked(length).unwrap_or((data, &[]));
    bits.data = rest;
    *total += block.len();
    (block.len() == length).then_some(())
}

fn compressed(
    bits: &mut Bits<'_>,
    literals: &Codes,
    distances: &Codes,
    total: &mut usize,
    limit: usize,
) -> Option<()> {
    while *total <= limit {
        match bits.code(literals)? {
            0..256 => *total += 1,
            256 => break,
            code => {
                let (shortest, more) = MATCHES.get(code - 257).copied().unwrap_or_default();
                let length = shortest + bits.take(more)?;
                let (nearest, more) = DISTANCES.get(bits.code(distances)?).copied().unwrap_or_default();
                let distance = nearest + bits.take(more)?;
                // A distance that leads before the data adds nothing.
                if (1..=*total).contains(&distance) {
                    *total += length;
                }
            }
        }
    }
    Some(())
}

/// Bits, the lowest of each byte first.
struct Bits<'a> {
    data: &'a [u8],
    held: u32,
    count: u32,
}

impl Bits<'_> {
    /// Holds some bits, or all that are left.
    fn hold(&mut self, count: u32) {
        while self.count < count
            && let [byte, rest @ ..] = self.data
        {
            self.held |= u32::from(*byte) << self.count;
            (self.data, self.count) = (rest, self.count + 8);
        }
    }

    fn take(&mut self, count: u32) -> Option<usize> {
        self.hold(count);
        let value = self.held & ((1 << count) - 1);
        self.count = self.count.checked_sub(count)?;
        self.held >>= count;
        Some(value as usize)
    }

    fn code(&mut self, codes: &Codes) -> Option<usize> {
        self.hold(codes.longest);
        let (length, symbol) = codes.symbols[(self.held & ((1 << codes.longest) - 1)) as usize];
        self.take(u32::from(length)).filter(|_| length > 0)?;
        Some(usize::from(symbol))
    }

    /// The codes of a block, for literals and for distances.
    fn codes(&mut self) -> Option<(Codes, Codes)> {
        let (literals, distances) = (self.take(5)? + 257, self.take(5)? + 1);
        let given = self.take(4)? + 4;
        let mut lengths = [0; 19];
        for place in &ORDER[..given] {
            lengths[*place] = self.take(3)? as u8;
        }
        let codes = Codes::new(&lengths);
        let mut lengths = Vec::new();
        while lengths.len() < literals + distances {
            let (length, count) = match self.code(&codes)? {
                16 => (lengths.last().copied().unwrap_or_default(), self.take(2)? + 3),
                17 => (0, self.take(3)? + 3),
                18 => (0, self.take(7)? + 11),
                length => (length as u8, 1),
            };
            lengths.extend(std::iter::repeat_n(length, count));
        }
        let (first, second) = lengths[..literals + distances].split_at(literals);
        Some((Codes::new(first), Codes::new(second)))
    }
}

/// The symbols by the bits that begin with their codes, and the codes' lengths; a length of 0 is no code.
struct Codes {
    symbols: Vec<(u8, u16)>,
    longest: u32,
}

impl Codes {
    fn new(lengths: &[u8]) -> Codes {
        let longest = u32::from(lengths.iter().copied().max().unwrap_or_default());
        let mut symbols = vec![(0, 0); 1 << longest];
        let mut code = 0_u32;
        for length in 1..=longest as u8 {
            for (symbol, _) in lengths.iter().enumerate().filter(|(_, of)| **of == length) {
                let reversed = code.reverse_bits() >> (32 - u32::from(length));
                let places = symbols.iter_mut().skip(reversed as usize).step_by(1 << length);
                places.for_each(|place| *place = (length, symbol as u16));
                code += 1;
            }
            code <<= 1;
        }
        Codes { symbols, longest }
    }
}
