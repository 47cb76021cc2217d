//! Templates that are made to harm the program that renders them.

use std::time::{Duration, Instant};

use super::bounds::{LateThreads, MAX_SOURCE};
use super::*;

/// The error of rendering a template, if there is one.
fn error_of(source: &str) -> Option<String> {
    let rendered = ChatTemplate::new(source, None, None)
        .and_then(|template| template.render(&[Message::text("user", "hi")], &[], true));
    rendered.err().map(|error| error.to_string())
}

fn times(text: &str, count: usize) -> String {
    text.repeat(count)
}

#[test]
fn a_template_takes_bounded_memory_and_time() {
    let ns = |start: &str, count: usize, body: &str| {
        format!(
            "{{% set ns = namespace(x={start}) %}}{{% for i in range({count}) %}}{{% set ns.x = {body} %}}{{% endfor %}}"
        )
    };
    let a = "'aaaaaaaaaaaaaaaa'";
    for source in [
        ns(a, 60, "ns.x ~ ns.x"),
        ns(a, 60, "ns.x + ns.x"),
        ns(a, 30, "ns.x|replace('a', ns.x)"),
        ns("[1]", 60, "[ns.x, ns.x]") + "{{ ns.x }}",
        times("{% set x = x ~ x %}", 60).replacen("x ~ x", a, 1),
        "{{ 'a' * 1000000000000 }}".to_owned(),
        "{{ ([1] * 100000000000)|length }}".to_owned(),
        "{{ 'a\nb'|indent(100000000000) }}".to_owned(),
        "{{ '%100000000000d'|format(1) }}".to_owned(),
        "{{ [1]|batch(100000000000, 0)|list|length }}".to_owned(),
        "{{ [1]|slice(100000000000)|list|length }}".to_owned(),
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}".to_owned(),
        "{% set s = 'a' * 50000000 %}{% for i in range(100000) %}{% set x = s|upper %}{% endfor %}"
            .to_owned(),
        "{% for i in range(100000) %}{% set x = range(100000)|list|sort|length %}{% endfor %}".to_owned(),
        "{% set s = 'a' * 50000000 %}{% for i in range(400) %}{{ s }}{% endfor %}".to_owned(),
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}".to_owned(),
    ] {
        let error = error_of(&source).unwrap_or_else(|| panic!("{source}"));
        assert!(error.contains("cannot write this conversation"), "{source}: {error}");
    }
}

#[test]
fn a_template_overflows_no_stack() {
    let full = |text: &str| times(text, (MAX_SOURCE - 100) / text.len());
    for source in [
        format!("{{{{ {}1 }}}}", full("not ")),
        format!("{{{{ {}1 }}}}", full("-")),
        format!("{{{{ a{} }}}}", full(".b")),
        format!("{{{{ 'a'{} }}}}", full("|upper")),
        format!("{{{{ 'a'{} }}}}", full("|e")),
        format!("{{{{ 1{} }}}}", full("+1")),
        format!("{{{{ 'a'{} }}}}", full("~'a'")),
        format!("{{{{ a{} }}}}", full("[0]")),
        format!("{{{{ a{} }}}}", full("()")),
        format!("{{{{ 1{} }}}}", full("**1")),
        format!("{{{{ 1{} }}}}", full(" if 1 else 1")),
        format!("{{% if a %}}{}{{% endif %}}", full("{% elif a %}")),
        format!("{{{{ {}1{} }}}}", times("(", 10_000), times(")", 10_000)),
        format!("{}{}", times("{% if true %}", 2_000), times("{% endif %}", 2_000)),
    ] {
        // It may be a right template or a wrong one: it comes back.
        error_of(&source);
    }
    let nest = "{% set ns = namespace(x=[], y=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% set ns.y = [ns.y] %}{% endfor %}";
    let deep = |rest: &str| error_of(&format!("{}{rest}", nest.replace("100000", "30000")));
    assert_eq!(deep(""), None);
    assert_eq!(deep("{{ ns.x == ns.y }}{{ (ns.x ~ '')|length }}"), None);
    for written in ["{{ ns.x }}", "{{ ns.x|tojson }}", "{{ ns.x|string|length }}"] {
        assert!(deep(written).unwrap().contains("more than 256 levels"), "{written}");
    }
    assert!(error_of(nest).unwrap().contains("out of fuel"));
    // Nearly all fuel goes into depth.
    let levels = times("[", 60) + "ns.x" + &times("]", 60);
    let nest = nest.replace("[ns.x]", &levels).replace("{% set ns.y = [ns.y] %}", "");
    assert!(error_of(&nest).unwrap().contains("out of fuel"));
    assert_eq!(error_of(&(nest.replace("100000", "7500") + "{{ (ns.x ~ '')|length }}")), None);
}

#[test]
fn a_namespace_in_itself_is_refused() {
    for source in [
        "{% set ns = namespace(x=1) %}{% set ns.x = ns %}{{ ns }}",
        "{% set ns = namespace(x=1) %}{% set ns.x = [ns] %}{{ ns.x }}",
        "{% set ns = namespace(x=1) %}{% set ns.x = [ns] %}{{ ns.x|tojson }}",
        "{% set ns = namespace(x=1) %}{% set ns.x = {'a': ns} %}{{ ns.x|string }}",
    ] {
        let error = error_of(source).unwrap();
        assert!(error.contains("more than 256 levels"), "{source}: {error}");
    }
}

#[test]
fn a_panic_of_the_template_engine_is_an_error() {
    let work = || -> Result<()> { panic!("on purpose") };
    let panic = bounds::on_large_stack(&LateThreads::default(), work).unwrap_err();
    assert!(panic.to_string().contains("makes the template engine panic"), "{panic}");
}

/// Work that was late since the machine stood still ends, and then others begin again.
#[test]
fn work_past_its_deadline_is_an_error_and_no_other_is_begun_before_it_ends() {
    let (late, (held, end)) = (LateThreads::default(), std::sync::mpsc::channel::<()>());
    let waits = move || Ok(end.recv().is_ok());
    let error = bounds::within(Duration::ZERO, &late, waits).unwrap_err().to_string();
    assert!(error.contains("chat template takes more than 30 seconds"), "{error}");
    let again = bounds::on_large_stack(&late, || -> Result<()> { panic!("begun meanwhile") }).unwrap_err();
    assert_eq!(again.to_string(), error);
    drop(held);
    let began = Instant::now();
    while bounds::on_large_stack(&late, || Ok(())).is_err() {
        assert!(began.elapsed() < Duration::from_secs(60), "it has ended");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_template_is_no_larger_than_its_limit() {
    let error = error_of(&times("a", MAX_SOURCE + 1)).unwrap();
    assert!(error.contains("has 65537 bytes, more than the limit of 65536"), "{error}");
    assert_eq!(error_of(&times("a", MAX_SOURCE)), None);
}
