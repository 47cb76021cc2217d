//! `refrain store prune`.

use super::*;

#[test]
fn what_no_document_names_is_told_noted_and_then_deleted() {
    let home = Home::new();
    let (library, remote) = (home.path("library"), url(&home, "library"));
    let file = passages(&home, 3);
    home.run(&[&["ingest", &file, "--remote", &remote], &SETTINGS[..]].concat()).good();
    let named = names(&library, ".safetensors");
    let other = home.write("other.txt", CHAINS.concat());
    let words = ["ingest", other.to_str().unwrap(), "--remote", &remote, "--sync-interval", "off"];
    home.run(&[&words, &SETTINGS[..]].concat()).good();
    let garbage = names(&library, ".safetensors").len() - named.len();
    assert!(garbage > 2);

    home.run(&["store", "prune"]).failed(2, &["--remote"]);
    home.write("empty/.keep", "");
    let empty = url(&home, "empty");
    let ran = home.run(&["store", "prune", "--remote", &empty]);
    ran.failed(1, &[&format!("error: {empty} holds no document")]);
    let prune = |more: &[&str]| home.json(&[&["store", "prune", "--remote", &remote], more].concat());
    assert_eq!(prune(&["--delete"])["unused"], 0, "all is young");
    std::thread::sleep(Duration::from_millis(1100));
    let now = ["--unused", "1s", "--grace", "1s"];
    let noted = prune(&now);
    assert_eq!(
        (&noted["documents"], &noted["unused"], &noted["deleted"]),
        (&json!(3), &json!(garbage), &json!(0))
    );
    std::thread::sleep(Duration::from_millis(2100));
    let told = home.run(&[&["store", "prune", "--remote", &remote], &now[..]].concat()).good().out;
    assert!(told.contains(&format!("due: {garbage} chunks")) && told.contains("--delete"), "{told}");
    assert_eq!(names(&library, ".safetensors").len(), named.len() + garbage);
    assert_eq!(prune(&[&["--delete"], &now[..]].concat())["deleted"], garbage);
    assert_eq!(names(&library, ".safetensors"), named);
    assert!(names(&library.join("garbage"), "").iter().all(|name| !name.contains("lease")));
}
