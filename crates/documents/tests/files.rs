//! Real files, beside what is read of them.

use std::path::{Path, PathBuf};

use refrain_documents::limits::{MAX_TEXT_BYTES, MAX_TITLE_CHARS};
use refrain_documents::{Document, Files, ReadError, files, read, read_path};

fn samples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files")
}

fn sample(name: &str) -> Result<Vec<Document>, ReadError> {
    read(&std::fs::read(samples().join(name)).unwrap(), name)
}

fn error(name: &str) -> String {
    sample(name).unwrap_err().to_string()
}

#[test]
fn real_files_are_read_as_expected() {
    let names = [
        "handbook.html",
        "handbook-chromium.pdf",
        "handbook-libreoffice.pdf",
        "handbook-libreoffice.docx",
        "handbook-word.docx",
        "columns.pdf",
        "code.pdf",
        "restricted.pdf",
        "utf-16.txt",
        "latin-1.html",
    ];
    for name in names {
        let documents = sample(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(documents.len(), 1, "{name}");
        let found = format!("{}\n\n{}\n", documents[0].title, documents[0].text.trim_end());
        let path = samples().join(format!("{name}.expected"));
        if std::env::var_os("REFRAIN_BLESS").is_some() {
            std::fs::write(&path, &found).unwrap();
        }
        assert_eq!(found, std::fs::read_to_string(&path).unwrap(), "{name}");
    }
}

#[test]
fn files_that_cannot_be_read_say_why_in_a_line() {
    assert_eq!(error("encrypted.pdf"), "encrypted; save it without a password first");
    assert_eq!(error("scanned.pdf"), "has no text: scanned pages need OCR first, for example with ocrmypdf");
    assert!(error("truncated.docx").starts_with("not a well-formed DOCX: "), "{}", error("truncated.docx"));
    assert_eq!(error("latin-1.txt"), "not UTF-8 at byte 13; convert it, for example with iconv");
    for name in ["encrypted.pdf", "scanned.pdf", "truncated.docx", "latin-1.txt"] {
        assert!(!error(name).contains('\n'));
    }
}

#[test]
fn what_holds_no_text_is_named() {
    let kinds: [(&[u8], &str, &str); 5] = [
        (b"\x89PNG\r\n\x1A\n", "wheel.png", "an image"),
        (b"\xFF\xD8\xFF\xE0", "wheel.txt", "an image"),
        (b"\x1F\x8B\x08", "notes.txt.gz", "an archive"),
        (b"\x7FELF\x02", "refrain", "a program"),
        (b"MZ\x90\0\x03", "a.exe", "a binary file"),
    ];
    for (bytes, name, kind) in kinds {
        let expected = format!("{kind} is not read; PDF, DOCX, HTML, Markdown, text and JSONL are");
        assert_eq!(read(bytes, name).unwrap_err().to_string(), expected, "{name}");
    }
}

#[test]
fn one_bad_file_does_not_stop_the_others() {
    let reading = read_path(&samples());
    let failed: Vec<_> =
        reading.failures.iter().map(|failure| failure.path.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(failed, ["encrypted.pdf", "latin-1.txt", "scanned.pdf", "truncated.docx"]);
    // The note on the samples is read too.
    assert_eq!(reading.documents.len(), 11);
    let line = reading.failures[0].to_string();
    assert!(line.ends_with("encrypted.pdf: encrypted; save it without a password first"), "{line}");
}

#[test]
fn cut_files_of_all_lengths_give_an_error_or_text() {
    for name in ["handbook-word.docx", "columns.pdf", "handbook.html"] {
        let bytes = std::fs::read(samples().join(name)).unwrap();
        for length in (0..bytes.len()).step_by(bytes.len() / 12) {
            let _ = read(&bytes[..length], name);
        }
    }
}

#[test]
fn folders_are_walked_in_order_without_hidden_files_and_links_to_folders() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    std::fs::create_dir_all(root.join("b/deep")).unwrap();
    std::fs::create_dir_all(root.join(".hidden")).unwrap();
    for name in ["c.MD", "a.txt", "b/x.html", "b/deep/y.jsonl", ".z.txt", ".hidden/w.txt", "picture.png"] {
        std::fs::write(root.join(name), "{\"text\": \"<p>x\"}").unwrap();
    }
    #[cfg(unix)]
    std::os::unix::fs::symlink(root, root.join("b/loop")).unwrap();
    let Files { found, failures, others } = files(root);
    let found: Vec<_> = found.iter().map(|path| path.strip_prefix(root).unwrap().to_str().unwrap()).collect();
    assert_eq!(found, ["a.txt", "b/deep/y.jsonl", "b/x.html", "c.MD"]);
    assert_eq!(others, [root.join("picture.png")]);
    let failures: Vec<String> = failures.iter().map(ToString::to_string).collect();
    let linked = format!("{}: is a link to a folder", root.join("b/loop").display());
    assert_eq!(failures.len(), usize::from(cfg!(unix)));
    assert!(failures.iter().all(|failure| failure.starts_with(&linked)), "{failures:?}");
    assert_eq!(files(&root.join("picture.png")).found.len(), 1);
    let missing = read_path(&root.join("missing"));
    assert_eq!(missing.failures.len(), 1);
    assert!(matches!(missing.failures[0].error, ReadError::Io(_)));
}

#[test]
fn titles_end_at_their_limit() {
    let long = "ä".repeat(3 * MAX_TITLE_CHARS);
    for (name, content) in [
        ("a.html", format!("<title>{long}</title><p>text")),
        ("b.html", format!("<h1>{long}</h1><p>text")),
        ("c.jsonl", format!("{{\"title\": \"{long}\", \"text\": \"text\"}}")),
    ] {
        let documents = read(content.as_bytes(), name).unwrap();
        assert_eq!(documents[0].title, long[..2 * MAX_TITLE_CHARS], "{name}");
    }
}

#[test]
fn plain_text_has_the_limit_of_other_texts() {
    let text = vec![b'a'; MAX_TEXT_BYTES + 1];
    let record = [b"{\"text\": \"", text.as_slice(), b"\"}"].concat();
    for (bytes, name) in [(&text, "long.txt"), (&text, "long.md"), (&record, "long.jsonl")] {
        let error = read(bytes, name).unwrap_err().to_string();
        assert!(error.contains("too large: text beyond the limit of 32 MiB"), "{name}: {error}");
    }
    assert_eq!(read(&text[1..], "long.txt").unwrap().len(), 1);
}
