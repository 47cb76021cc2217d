#![no_main]

use libfuzzer_sys::fuzz_target;

// The first byte is the limit, the rest a text: all of it is in one of the pieces, in order.
fuzz_target!(|input: (u8, &str)| {
    let (max, text) = (usize::from(input.0), input.1);
    let pieces = refrain_documents::split(text, max, max / 8, |range| range.len());
    let solid = |text: &str| text.chars().filter(|c| !c.is_whitespace()).collect::<String>();
    assert_eq!(solid(text), pieces.iter().map(|piece| solid(&piece.text)).collect::<String>());
    for piece in &pieces {
        assert_eq!(&text[piece.range.clone()], piece.text);
        let _ = piece.headed("Title");
    }
});
