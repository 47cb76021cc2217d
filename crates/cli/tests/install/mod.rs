//! What packages put beside the program: completion scripts and manual pages of every command; and the health check.

use std::collections::BTreeSet;

use super::*;

/// The words of every command, as the help of the program and of its commands tells them.
fn commands(home: &Home, words: &[&str]) -> Vec<Vec<String>> {
    let help = home.run(&[words, &["--help"]].concat()).good().out;
    let mut found = vec![words.iter().map(|&word| word.to_owned()).collect()];
    let Some((_, below)) = help.split_once("Commands:\n") else { return found };
    for line in below.lines().take_while(|line| line.starts_with("  ")) {
        let name = line.split_whitespace().next().unwrap();
        // Deeper lines go on with a description.
        if line.starts_with("   ") || name == "help" {
            continue;
        }
        found.extend(commands(home, &[words, &[name]].concat()));
    }
    found
}

#[test]
fn every_command_has_a_manual_page_and_is_completed() {
    let home = Home::new();
    let commands = commands(&home, &[]);
    assert!(commands.len() > 30, "{commands:?}");
    let folder = home.path("share/man/man1");
    let told = home.json(&["man", folder.to_str().unwrap()]);
    assert_eq!(told["pages"].as_array().unwrap().len(), commands.len());
    let mut pages: BTreeSet<String> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let scripts: Vec<(&str, String)> =
        ["bash", "zsh", "fish"].map(|shell| (shell, home.run(&["completions", shell]).good().out)).into();
    for words in &commands {
        let name = std::iter::once("refrain").chain(words.iter().map(String::as_str)).collect::<Vec<_>>();
        let file = format!("{}.1", name.join("-"));
        assert!(pages.remove(&file), "{file} is missing");
        let page = std::fs::read_to_string(folder.join(&file)).unwrap();
        for part in [".TH REFRAIN", ".SH NAME", ".SH SYNOPSIS", ".SH OPTIONS"] {
            assert!(page.contains(part), "{file}: {part}: {page}");
        }
        // The options of all commands stand in the program's page alone, and with their text.
        assert_eq!(page.contains("\\-\\-chunk\\-tokens\\fR"), words.is_empty(), "{file}");
        assert_eq!(page.contains("Most tokens of a chunk"), words.is_empty(), "{file}");
        if let Some(last) = words.last() {
            for (shell, script) in &scripts {
                assert!(script.contains(last.as_str()), "{shell}: {words:?}");
            }
        }
    }
    assert!(pages.is_empty(), "pages of no command: {pages:?}");
    // A folder that cannot be made is named.
    let file = home.write("file", "");
    home.run(&["man", file.join("below").to_str().unwrap()]).failed(1, &["below"]);
}

#[test]
fn health_tells_whether_a_server_takes_requests() {
    let home = Home::new();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    // A server of two words: ready at first, then shutting down.
    let server = std::thread::spawn(move || {
        for status in ["200 OK", "200 OK", "503 Service Unavailable"] {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            let mut piece = [0; 1 << 10];
            while !request.windows(4).any(|part| part == b"\r\n\r\n") {
                let n = std::io::Read::read(&mut stream, &mut piece).unwrap();
                request.extend(&piece[..n]);
            }
            assert!(request.starts_with(b"GET /ready HTTP/1.1\r\n"));
            let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    // The variable that moves the server moves the check of an image too.
    let mut command = home.command(&["health"]);
    let ran =
        Ran::of(command.env("REFRAIN_PORT", &port).env("http_proxy", "http://127.0.0.1:1").output().unwrap());
    assert!(ran.good().out.contains("takes requests"));
    let url = format!("127.0.0.1:{port}/");
    assert_eq!(home.json(&["health", &url])["url"], format!("http://127.0.0.1:{port}"));
    home.run(&["health", "--port", &port]).failed(1, &["503", &port]);
    server.join().unwrap();
    home.run(&["health", "--port", &port]).failed(1, &["no answer", &port, "`refrain serve`"]);
    for url in ["ftp://localhost", "http://", "no server"] {
        home.run(&["health", url]).failed(2, &["is no URL of a server", "http://127.0.0.1:8080"]);
    }
}
