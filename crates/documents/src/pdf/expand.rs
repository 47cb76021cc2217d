//! How many bytes data hold under the filters beside deflate, and the bytes of those that write data as text.

/// The bytes that data in LZW hold. Counts little beyond `limit`. (ISO 32000-2, 7.4.4)
pub(super) fn lzw(data: &[u8], limit: usize) -> usize {
    // Codes may become longer one code early, which parameters elsewhere tell.
    lzw_of(data, limit, 1).max(lzw_of(data, limit, 0))
}

fn lzw_of(data: &[u8], limit: usize, early: usize) -> usize {
    const CLEAR: usize = 256;
    const END: usize = 257;
    // The length of each entry of the table.
    let mut lengths = [1_usize; 4096];
    let (mut size, mut previous, mut total) = (END + 1, None, 0);
    let (mut bits, mut held) = (0_u32, 0);
    let mut bytes = data.iter();
    while total <= limit {
        let width = (usize::BITS - (size + early).leading_zeros()).clamp(9, 12);
        while held < width {
            let Some(byte) = bytes.next() else { return total };
            bits = bits << 8 | u32::from(*byte);
            held += 8;
        }
        let code = (bits >> (held - width) & ((1 << width) - 1)) as usize;
        held -= width;
        match code {
            CLEAR => (size, previous) = (END + 1, None),
            END => return total,
            _ if code > size || code == size && (previous.is_none() || size == lengths.len()) => {
                return total;
            }
            _ => {
                let longer = previous.map(|previous: usize| lengths[previous] + 1);
                if let Some(longer) = longer.filter(|_| size < lengths.len()) {
                    lengths[size] = longer;
                    size += 1;
                }
                total += lengths[code];
                previous = Some(code);
            }
        }
    }
    total
}

/// The bytes that runs of bytes hold. Counts little beyond `limit`. (ISO 32000-2, 7.4.5)
pub(super) fn run_length(mut data: &[u8], limit: usize) -> usize {
    let mut total = 0;
    while let [length, rest @ ..] = data
        && *length != 128
        && total <= limit
    {
        let length = usize::from(*length);
        let (held, taken) = if length < 128 { (length + 1, length + 1) } else { (257 - length, 1) };
        total += held;
        data = rest.get(taken..).unwrap_or_default();
    }
    total
}

/// The bytes of base 85, as far as they go. (ISO 32000-2, 7.4.3)
pub(super) fn ascii85(text: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let (mut group, mut digits) = (0_u32, 0);
    for &digit in text {
        match digit {
            b'!'..=b'u' => {
                group = group.wrapping_mul(85).wrapping_add(u32::from(digit - b'!'));
                digits += 1;
            }
            b'z' if digits == 0 => bytes.extend([0; 4]),
            digit if is_space(digit) => {}
            _ => break,
        }
        if digits == 5 {
            bytes.extend(group.to_be_bytes());
            (group, digits) = (0, 0);
        }
    }
    if digits > 1 {
        let padded = (digits..5).fold(group, |group, _| group.wrapping_mul(85).wrapping_add(84));
        bytes.extend(&padded.to_be_bytes()[..digits - 1]);
    }
    bytes
}

/// The bytes of hexadecimal digits, as far as they go. (ISO 32000-2, 7.4.2)
pub(super) fn ascii_hex(text: &[u8]) -> Vec<u8> {
    let (mut bytes, mut high) = (Vec::new(), None);
    let digits = text.iter().filter(|byte| !is_space(**byte));
    for digit in digits.map_while(|byte| char::from(*byte).to_digit(16)) {
        match high.take() {
            Some(high) => bytes.push((high << 4 | digit) as u8),
            None => high = Some(digit),
        }
    }
    bytes.extend(high.map(|high| (high << 4) as u8));
    bytes
}

pub(super) fn is_space(byte: u8) -> bool {
    matches!(byte, 0 | b'\t' | b'\n' | 12 | b'\r' | b' ')
}
