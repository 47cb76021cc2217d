"""Makes the sample files of this folder that a program of Python makes: pip install python-docx pypdf reportlab pillow"""
import io, sys, docx, pypdf
from PIL import Image, ImageDraw
from reportlab.pdfgen import canvas
from reportlab.lib.utils import ImageReader

# Word, by python-docx.
d = docx.Document()
d.core_properties.title = "Bicycle Handbook"
# One font keeps the PDF that LibreOffice makes of it small.
for style in d.styles:
    if getattr(style, "font", None) is not None:
        fonts = style.element.get_or_add_rPr().get_or_add_rFonts()
        for key in list(fonts.attrib): del fonts.attrib[key]
        style.font.name, style.font.bold = "Liberation Sans", None
d.add_heading("Bicycle Handbook", 0)
d.add_paragraph("This handbook explains how to keep your bicycle safe. It has two chapters.")
d.add_heading("Brakes", 1)
d.add_paragraph("Check both brakes before each ride & replace a frayed cable <at once>.")
d.add_heading("Rear wheel", 2)
p = d.add_paragraph("Turn the barrel ")
p.add_run("adjuster").bold = True
p.add_run(" by half a turn.")
d.add_paragraph("Loosen the bolt.", style="List Number")
d.add_paragraph("Pull the cable.", style="List Number")
d.add_paragraph("Pads", style="List Bullet")
d.add_paragraph("Cables", style="List Bullet")
t = d.add_table(rows=1, cols=3)
for c, x in zip(t.rows[0].cells, ["Part", "Bolt", "Torque"]): c.text = x
for row in [("Stem", "M5", "5 Nm"), ("Seat post", "M6", "12 Nm")]:
    for c, x in zip(t.add_row().cells, row): c.text = x
d.add_heading("Lights", 1)
d.add_paragraph("At night a white front lamp is required. Zweite Überschrift folgt: Größe, naïve, 自行车.")
d.save("handbook-word.docx")
open("truncated.docx", "wb").write(open("handbook-word.docx", "rb").read()[:9000])

# A page of one picture, as a scanner makes it.
image = Image.new("1", (620, 877), 1)
ImageDraw.Draw(image).text((60, 60), "Scanned page without text", fill=0)
c = canvas.Canvas("scanned.pdf", pagesize=(595, 842), invariant=1)
c.drawImage(ImageReader(image), 0, 0, 595, 842)
c.save()

# Two encrypted files: one opens with a password, the other forbids printing alone.
for name, user in [("encrypted.pdf", "secret"), ("restricted.pdf", "")]:
    c = canvas.Canvas("plain.pdf", invariant=1)
    c.setFont("Helvetica", 12)
    c.drawString(72, 720, "The brakes of a bicycle must be checked before each ride.")
    c.save()
    w = pypdf.PdfWriter(clone_from="plain.pdf")
    w.encrypt(user, "owner", algorithm="RC4-128")
    w.write(name)

text = "# Bremsen\n\nGröße und Übersetzung prüfen.\n"
open("utf-16.txt", "wb").write(text.encode("utf-16"))
open("latin-1.txt", "wb").write(text.encode("latin-1"))
page = "<html><head><meta charset='iso-8859-1'><title>Größe</title></head><body><p>Übersetzung prüfen\u20ac.</p></body></html>"
open("latin-1.html", "wb").write(page.encode("cp1252"))
